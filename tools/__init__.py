"""What writes files of the repository: outputs in its pages, tables, the bundled model and questions."""
