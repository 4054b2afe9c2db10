"""Following data from a softmax to the values and on to W_o, through any operators that attention is written with."""
