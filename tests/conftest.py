"""One torch thread per test process: the suites run beside a server on few cores."""

import torch

torch.set_num_threads(1)
