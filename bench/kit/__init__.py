"""What the measurements of the gateway are made of; `bench/gateway.py` puts them together.

`server`: processes, their CPU and memory · `lines`: what is measured, as started servers · `ask`: one HTTP connection
· `closed`, `pace`, `stream`, `growth`: the measurements · `table`: how figures are gathered and shown.
"""
