"""Text on both sides of the model: messages to token ids and their breakpoints, generated ids to events. No torch."""
