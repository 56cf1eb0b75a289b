"""Text and token ids of a checkpoint: the tokenizer and the chat template that its folder holds.

    tokenizer   text to token ids and back
    chat        messages to a prompt, by the folder's chat template
    files       the files of a folder that texts depend on, and what is wrong with one
    loading     a folder's tokenizer, as SGLang's own server loads it
    repairs     what SGLang mends of a tokenizer that transformers has loaded
    fidelity    a loaded tokenizer beside the folder's tokenizer.json
    trial       `python -m tokenization.trial`: whether the texts of folders can be used, in a process of its own

The gateway works with it; the loader tries each model that it lists. Nothing here imports torch.
"""
