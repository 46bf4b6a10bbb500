// Command certgen makes and renews the certificates of a Watershed in the Secrets of its namespace.
package main

import (
	"fmt"
	"os"

	"watershed.dev/cmd/certgen"
)

func main() {
	if err := certgen.Command("certgen", os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "certgen:", err)
		os.Exit(1)
	}
}
