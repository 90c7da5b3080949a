"""Which request goes out when: reading ahead in the order in which samples will be wanted."""
