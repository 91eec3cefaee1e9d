"""The commit protocol: journal, records, manifests, lineage, writers and operators on any store.

Nothing here knows of torch or of a particular backend. PROTOCOL rules are kept in this package and nowhere else.
"""
