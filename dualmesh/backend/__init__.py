"""All that a backend implements and is given."""
