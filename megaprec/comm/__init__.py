"""Communication: the axes of the mesh and their collectives, the sharding of parameters, and
random numbers that do not depend on the layout.
"""
