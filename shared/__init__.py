"""What all services share: nouns, messages, device model, look-up table, shell."""
