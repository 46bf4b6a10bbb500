package main

import (
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
)

// damageFiles damages the files of a NATS server that does not run. The seed determines whether power was lost, or a
// random file is truncated, or some of its bits are flipped.
func damageFiles(dir string, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 2))
	powerLoss, flip := r.IntN(3) == 0, r.IntN(2) == 0
	if powerLoss {
		return truncateBlocks(dir, r)
	}
	files, err := filesOf(dir, "")
	if err != nil || len(files) == 0 {
		return err
	}
	return rewrite(files[r.IntN(len(files))], func(data []byte) []byte {
		if !flip {
			return data[:r.IntN(len(data))]
		}
		for range 1 + r.IntN(8) {
			data[r.IntN(len(data))] ^= 1 << r.IntN(8)
		}
		return data
	})
}

// truncateBlocks truncates each block of messages of a NATS server that does not run, as a loss of power may.
func truncateBlocks(dir string, r *rand.Rand) error {
	files, err := filesOf(dir, ".blk")
	if err != nil {
		return err
	}
	for _, path := range files {
		if err := rewrite(path, func(data []byte) []byte { return data[:r.IntN(len(data))] }); err != nil {
			return err
		}
	}
	return nil
}

// filesOf returns the regular files below dir whose names end with suffix.
func filesOf(dir, suffix string) (files []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(path, suffix) {
			files = append(files, path)
		}
		return err
	})
	return files, err
}

// rewrite changes the content of a file that is not empty.
func rewrite(path string, change func([]byte) []byte) error {
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		return err
	}
	return os.WriteFile(path, change(data), 0o600)
}
