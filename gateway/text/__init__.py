"""From token ids to the text of an answer: detokenizing, stop strings, echo; sampling defaults; prompts of
rerankers."""
