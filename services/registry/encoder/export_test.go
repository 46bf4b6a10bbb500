package encoder

// Printed is printed.
var Printed = printed
