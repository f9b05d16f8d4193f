"""What a GPU's compiler makes of a program."""
