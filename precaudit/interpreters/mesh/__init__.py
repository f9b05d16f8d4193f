"""What a compiler makes of a program on several devices."""
