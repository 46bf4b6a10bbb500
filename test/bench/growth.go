package main

func growth(string) {}
