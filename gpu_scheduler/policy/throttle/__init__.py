"""Which models prefill more slowly because neighbours that decode would miss their TPOT targets."""
