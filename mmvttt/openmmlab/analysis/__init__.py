"""Analysis of models of OpenMMLab and of their trainings."""
