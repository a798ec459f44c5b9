"""How the bundled model `agentspec/assets/tiny-agent` is made: sessions, tokenizer, training, evaluation. Its README is
the model card."""
