"""Which change did it: a search over the changes between what is good and what is bad."""
