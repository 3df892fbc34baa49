"""From a YAML file to a table, ``rows.jsonl`` and a report."""
