package conversion

// EncodeRow exports encodeRow.
var EncodeRow = encodeRow
