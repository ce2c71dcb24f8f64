"""The applications: what the method is used with. They import the packages beside this one, never the reverse."""
