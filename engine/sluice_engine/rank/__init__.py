"""A rank: executes the step records that it is handed."""
