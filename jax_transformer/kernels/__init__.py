"""Forms of the same numbers for one kind of machine, and the door that chooses among them."""
