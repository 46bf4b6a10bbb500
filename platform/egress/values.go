package egress

// Values counts the JSON values in the data that is written to it, in pieces of any size. A bound on bytes does not
// suffice, because three bytes of JSON decode to a struct of hundreds of bytes. Values counts brackets and commas
// outside of strings. The zero value is ready to use.
type Values struct {
	// Base64 also counts the JSON inside base64 strings, because an admission webhook returns a patch in base64.
	Base64 bool

	count        int
	outer, inner scan
	// bits holds the last have bits of a base64 string that do not fill a byte yet.
	bits, have uint
	// plain is true if the string is not base64.
	plain bool
}

// scan is the state of the scanner at a position in JSON.
type scan struct{ quoted, escaped bool }

// next returns true if a value begins or follows at c.
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

// decode processes the next byte of a base64 string. It skips escaped line breaks.
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

// sixBits returns the value of a base64 character.
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

// Count returns the number of values so far.
func (v *Values) Count() int { return v.count }

// ValuesOf returns the number of values in a JSON document.
func ValuesOf(data []byte) int {
	var v Values
	_, _ = v.Write(data)
	return v.count
}
