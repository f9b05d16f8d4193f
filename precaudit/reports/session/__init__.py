"""``precaudit open``: a run as one sitting in a terminal. textual is imported by ``app`` and ``widgets`` alone."""
