"""SGLang's pools and allocators over an elastic range.

pool, latent_pool, states       SGLang's pools as views over the range: keys and values, latent rows (MLA), states of
                                recurrent layers; states with their allocator
kv_views                        the places of a token's K and V in the range
allocator, paged_allocator      SGLang's token allocators over the range
window_allocator                SGLang's allocator for models whose layers partly have a window
"""
