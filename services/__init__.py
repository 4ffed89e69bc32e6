"""The five services, and the command line that starts them."""
