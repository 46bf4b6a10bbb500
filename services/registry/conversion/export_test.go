package conversion

// EncodeRow is printed.
var EncodeRow = encodeRow
