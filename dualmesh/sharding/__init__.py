"""Which slice of an array a rank holds, and what moves between two layouts."""
