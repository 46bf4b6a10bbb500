package main

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
)

// damageFiles damages the files of a NATS server that does not run. The seed determines whether power was lost, which
// truncates each block of messages, or a random file is truncated, or some of its bits are flipped.
func damageFiles(dir string, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 2))
	powerLoss, flip := r.IntN(3) == 0, r.IntN(2) == 0
	var files []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if !powerLoss || strings.HasSuffix(path, ".blk") {
			files = append(files, path)
		}
		return nil
	})
	if err != nil || len(files) == 0 {
		return err
	}
	if !powerLoss {
		files = []string{files[r.IntN(len(files))]}
	}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		switch {
		case len(data) == 0:
			continue
		case flip && !powerLoss:
			for range 1 + r.IntN(8) {
				data[r.IntN(len(data))] ^= 1 << r.IntN(8)
			}
		default:
			data = data[:r.IntN(len(data))]
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
	}
	return nil
}
