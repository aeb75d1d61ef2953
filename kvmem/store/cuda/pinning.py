"""(to come)"""


class Pinned:
    def __init__(self, runtime, address, num_bytes):
        self.reason = None
        self.num_bytes = num_bytes
        self.a = address
        self.r = runtime
        runtime.cudaHostRegister(address, num_bytes, 0)

    def unpin(self):
        if self.a:
            self.r.cudaHostUnregister(self.a)
            self.a = 0
