"""What a load consists of: arrival instants, lengths, prompts, and traces of real services. Pure numpy."""
