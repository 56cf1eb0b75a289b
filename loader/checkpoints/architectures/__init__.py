"""The model classes that engines serve, and readers of what their config.json says of a model.

classes                 the classes of decoders, a table
encoders                the classes of encoders
families                the shape of a model, the tensors its checkpoint must have, and why a model is refused
latent, two_shapes, mamba
                        layers other than plain attention with one shape of heads: latent rows (MLA), two shapes of
                        heads and what else Gemma 4 has, Mamba2
rope                    the context of a model, by its rotary embedding
kv_of_config            the kinds of KV of a model
quantisation            how linear layers are quantised, and which tensors they have
engine_source           the classes and parsers that the installed SGLang has
"""
