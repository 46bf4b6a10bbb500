package egress

// Values counts the values of JSON that is written to it, in any number of pieces. Bounds of bytes do not suffice:
// three bytes of JSON become a struct of hundreds. The count is of brackets and commas outside of strings. The zero
// value is ready to use.
type Values struct {
	// Base64 has a string in base64 count as the JSON that it decodes to: an admission webhook answers a patch so.
	Base64 bool

	count        int
	outer, inner scan
	// bits are the last have bits of a string in base64 that make no byte yet.
	bits, have uint
	// plain: the string is not in base64.
	plain bool
}

// scan is a place in JSON.
type scan struct{ quoted, escaped bool }

// next reports whether a value begins or follows with c.
func (s *scan) next(c byte) bool {
	switch {
	case s.escaped:
		s.escaped = false
	case s.quoted:
		s.escaped = c == '\\'
		s.quoted = c != '"'
	case c == '"':
		s.quoted = true
	default:
		return c == ',' || c == '[' || c == '{'
	}
	return false
}

// Write implements io.Writer. It never fails.
func (v *Values) Write(p []byte) (int, error) {
	for _, c := range p {
		if v.Base64 && v.outer.quoted {
			v.decode(c, v.outer.escaped)
		}
		if v.outer.next(c) {
			v.count++
		}
	}
	return len(p), nil
}

// decode counts one more byte of a string in base64. Escaped line breaks are not part of it.
func (v *Values) decode(c byte, escaped bool) {
	switch {
	case c == '"' && !escaped:
		v.inner, v.bits, v.have, v.plain = scan{}, 0, 0, false
		return
	case c == '\\' && !escaped || escaped && c != '/' || c == '=' || v.plain:
		return
	}
	six, ok := sixBits(c)
	if !ok {
		v.plain = true
		return
	}
	v.bits, v.have = v.bits<<6|six, v.have+6
	if v.have >= 8 {
		v.have -= 8
		if v.inner.next(byte(v.bits >> v.have)) {
			v.count++
		}
	}
}

// sixBits returns the bits of a character of base64.
func sixBits(c byte) (uint, bool) {
	switch {
	case 'A' <= c && c <= 'Z':
		return uint(c - 'A'), true
	case 'a' <= c && c <= 'z':
		return uint(c-'a') + 26, true
	case '0' <= c && c <= '9':
		return uint(c-'0') + 52, true
	case c == '+':
		return 62, true
	case c == '/':
		return 63, true
	}
	return 0, false
}

// Count returns how many values have been written.
func (v *Values) Count() int { return v.count }

// ValuesOf returns how many values JSON has.
func ValuesOf(data []byte) int {
	var v Values
	_, _ = v.Write(data)
	return v.count
}
