"""The one way through the library: problem, autodiff rules, plan, spans; and the facts they share."""
