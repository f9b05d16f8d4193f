"""The verbs: what a user calls, from the command line or from Python."""
