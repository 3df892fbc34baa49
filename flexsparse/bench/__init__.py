"""From a YAML file of problems to what their conversion costs and delivers."""
