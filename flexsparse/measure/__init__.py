"""What the conversion costs and attention delivers, beside others in the same run."""
