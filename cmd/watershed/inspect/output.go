package inspect

import (
	"fmt"

	"github.com/spf13/pflag"
)

// Output is the format of a command's output, the flag --output.
type Output string

// AddFlag adds --output to fs.
func (o *Output) AddFlag(fs *pflag.FlagSet) {
	fs.StringVarP((*string)(o), "output", "o", "text", `"text" or "json".`)
}

// Validate returns an error for an unknown format.
func (o Output) Validate() error {
	if o != "text" && o != "json" {
		return fmt.Errorf(`--output %q: want "text" or "json"`, string(o))
	}
	return nil
}

// IsJSON returns true if the format is JSON.
func (o Output) IsJSON() bool { return o == "json" }
