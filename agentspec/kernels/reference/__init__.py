"""Every operation in plain torch: slow, readable, and what faster implementations are tested against."""
