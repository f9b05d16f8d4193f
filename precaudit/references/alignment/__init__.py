"""What is what, found by values: parameters and tensors, what a conversion did wrong, points and the textbook's."""
