"""How other systems choose the clock and the SM shares of a GPU, a file per system."""
