package porttest

import (
	"fmt"
	"net"
	"testing"
)

// A port is returned once, and a server may listen on it.
func TestAPortIsReturnedOnce(t *testing.T) {
	seen := map[int]bool{}
	for range 50 {
		port := FreePort(t)
		if seen[port] {
			t.Errorf("port %d is returned twice", port)
		}
		seen[port] = true
		if reserve(port) {
			t.Errorf("port %d is not reserved", port)
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}
