"""llama.cpp's server out of the package xllamacpp, with the options of llama-server that the toolkit gives it."""

import argparse
import threading

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("-m", dest="model", required=True)
parser.add_argument("--jinja", action="store_true")
parser.add_argument("--ctx-size", type=int, required=True)
parser.add_argument("--parallel", type=int, required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
arguments = parser.parse_args()
settings = xllamacpp.CommonParams()
settings.model.path = arguments.model
settings.use_jinja = arguments.jinja
settings.n_ctx = arguments.ctx_size
settings.n_parallel = arguments.parallel
settings.port = arguments.port
settings.warmup = False
server = xllamacpp.Server(settings)
threading.Event().wait()
