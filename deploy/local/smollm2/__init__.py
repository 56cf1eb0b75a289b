"""SmolLM2-135M-Instruct, the instruct model that `make serve MODELS=smollm2` serves.

Its weights come in a Python package, as a GGUF file; an ordinary Hugging Face folder is made of it when it is first
asked for.

checkpoint           what the package's GGUF file becomes: weights, tokenizer, configuration
folder               where the folder is, whether it is current, and making it once for all who ask
chat_template.jinja  ChatML, with tools
__main__             the command line
"""
