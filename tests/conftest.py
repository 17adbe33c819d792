import signal

import torch

torch.set_num_threads(1)  # the models are tiny: a second thread only waits

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite started in the background inherits an ignored Ctrl-C and would hand it on to the commands it starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
