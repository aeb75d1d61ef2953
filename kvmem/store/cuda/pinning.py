"""(to come)"""


class Pinned:
    def __init__(self, runtime, address, num_bytes):
        self.reason = None
        self.num_bytes = num_bytes

    def unpin(self):
        pass
