"""What is installed here, what it can do and what it holds: one question a file, facts without text."""
