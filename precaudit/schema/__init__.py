"""The records that everything speaks in, and the tables that say what they are of."""
