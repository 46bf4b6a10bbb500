package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// copyTo replaces dir with a copy of the project's module, and adds the files that its tests read.
func (p project) copyTo(dir, kubectl string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := copyModule(dir, ".", source{module: p.module}); err != nil {
		return err
	}
	for to, from := range p.files {
		if err := copyModule(filepath.Join(dir, to), dir, from); err != nil {
			return err
		}
	}
	for to, from := range p.kustomizations {
		manifests, err := output(exec.Command(kubectl, "kustomize", filepath.Join(dir, from)))
		if err != nil {
			return err
		}
		to = filepath.Join(dir, to)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, manifests, 0o600)); err != nil {
			return err
		}
	}
	for file, pairs := range p.edits {
		file = filepath.Join(dir, file)
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for i := 0; i < len(pairs); i += 2 {
			if !bytes.Contains(text, []byte(pairs[i])) {
				return fmt.Errorf("%s does not have %q", file, pairs[i])
			}
		}
		text = []byte(strings.NewReplacer(pairs...).Replace(string(text)))
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// copyModule copies a directory of a module. The go.mod of root selects the version unless from names it.
func copyModule(to, root string, from source) error {
	cmd := exec.Command("go", "mod", "download", "-json", from.module)
	cmd.Dir = root
	description, err := output(cmd)
	if err != nil {
		return err
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(description, &module); err != nil {
		return err
	}
	return os.CopyFS(to, os.DirFS(filepath.Join(module.Dir, from.dir)))
}

// output returns the standard output of a command. Its error has the whole output.
func output(cmd *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s%s", cmd, err, out, stderr.Bytes())
	}
	return out, nil
}
