"""Islands: the store a run is shared through, leases, trust and admission, and the verbs that use them."""
