"""A toy framework in pure Python, with two backends, a plugin and harnesses.

It is the kit's own test subject and an example of everything that an author of a backend writes:
`framework` is what somebody else wrote, `explicit` the least backend, `implicit` one with optional
abilities, `plugin` the registration, `harness` what the kit needs.
"""
