"""Whole arrays over a state: laid out, read back, resharded, mapped over, differentiated."""
